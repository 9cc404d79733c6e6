"""Models from elsewhere and to elsewhere: Hugging Face folders in and out."""
