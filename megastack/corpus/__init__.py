"""Token files made from text: `megastack tokenize`."""
