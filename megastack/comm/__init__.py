"""Collectives, their differentiable pairs, point-to-point messages, and the observer that counts and records both."""
