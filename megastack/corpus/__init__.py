"""Create token files from text: `megastack tokenize`."""
