"""What every test may rely on."""

import signal

# A job in the background starts with Ctrl-C ignored, and so would every process that a test of it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
