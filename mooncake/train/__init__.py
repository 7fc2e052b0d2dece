"""Training of small K2-architecture checkpoints with MuonClip."""
