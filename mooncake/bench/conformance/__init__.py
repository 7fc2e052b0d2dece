"""What users of disaggregated servers complain of, asked of a server over HTTP."""
