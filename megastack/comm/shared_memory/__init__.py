"""Communication of the CPU ranks of one host through shared memory."""
