"""What a run says about itself: metrics, logs, status."""
