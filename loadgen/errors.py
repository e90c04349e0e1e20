"""What can go wrong with a run as a whole; what goes wrong with one request is an ``ErrorKind`` in its sample."""


class LoadgenError(Exception):
    """The run cannot be made or cannot go on; the message is a plain sentence for the terminal."""


class UsageError(LoadgenError):
    """An option, a file or a combination of options that makes no run."""


class WireError(Exception):
    """The server sent bytes that are not HTTP/1.1 or not an event stream; it fails the request that met them."""
