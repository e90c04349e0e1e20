"""The commands of ``python -m aserve``, one module each, thin: arguments in, exit code out."""
