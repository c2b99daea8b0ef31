"""Learner and sampling engines as Ray actors, replaced when they die: the driver's side of `shells.py`, and the core's only door to Ray.

The driver never blocks in Ray: it awaits, so that signals and timeouts get through.
"""
