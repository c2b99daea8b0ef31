"""Ask teachers: chat endpoints, models on disk, and programs that solve generated problems."""
