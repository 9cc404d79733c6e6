"""Collectives, their differentiable pairs, point-to-point messages and the ledger that counts them."""
