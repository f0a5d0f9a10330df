"""Training: from token ids to a checkpoint folder, with the same models and operators that serve.

recipe (numbers) and data (windows) go into trainer (the loop), which evaluation measures and curve
records. state saves an unfinished run, folder writes a finished one.
"""
