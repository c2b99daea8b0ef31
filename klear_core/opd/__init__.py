"""Offline on-policy distillation: answers of the student, and a teacher's log-probs of their tokens."""
