"""The Conductor's index of which worker holds which block, built from numbered block events."""
