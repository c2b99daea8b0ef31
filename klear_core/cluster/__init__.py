"""Run learner ranks and sampling engines as Ray actors. Nothing else in `klear_core` imports Ray."""
