"""Checks over HTTP for what users of disaggregated servers complain of."""
