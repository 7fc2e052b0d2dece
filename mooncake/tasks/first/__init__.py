"""The tasks that the shipped k2-demo was trained on. They go when its successor ships."""
