"""What holds for all tests."""

import signal

# Whoever starts the tests in the background may have had them ignore Ctrl-C; what they start and interrupt must not inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
