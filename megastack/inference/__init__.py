"""Generation and evaluation with a trained model, on any parallel layout."""
