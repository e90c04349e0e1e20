"""What the program tells about itself: log and metrics. Cheap on the loop; rendering happens in a thread."""
