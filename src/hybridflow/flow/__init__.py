"""What happens, and in which order: the loops, and the jobs that set them up."""
