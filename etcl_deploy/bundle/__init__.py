"""One small, safe file with everything needed to predict."""
