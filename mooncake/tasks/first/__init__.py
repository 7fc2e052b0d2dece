"""The tasks on which the shipped k2-demo was trained. They go when its successor ships."""
