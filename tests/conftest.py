"""What holds for all tests."""

import contextlib
import signal

# Whoever starts the tests in the background may have had them ignore Ctrl-C; what they start and interrupt must not inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No test fails because the machine is slow. vLLM's environment has no hypothesis.
with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any speed")
