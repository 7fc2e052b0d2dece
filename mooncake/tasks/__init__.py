"""Generates the tasks on which k2-demo is trained and with which any endpoint is evaluated."""
