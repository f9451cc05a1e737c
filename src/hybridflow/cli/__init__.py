"""The command line. Importing any file here imports nothing heavy; what a command needs is imported when it runs."""
