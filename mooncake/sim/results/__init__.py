"""Results of a simulated run: figures, JSON, plots and the HTML report."""
