"""Seeing a run: phases, spans, metrics files, progress."""
