"""The device: threads, memory and the one file that waits for it. Importing this package loads no torch."""
