"""Has the processes of workers run: starts, adopts, watches, restarts and ends them."""
