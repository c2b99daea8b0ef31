"""The one door to Ray: learner ranks and sampling engines as actors, their placement, and what travels between them."""
