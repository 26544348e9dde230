"""What an evaluation compares.

In: a TARGET, or the values of --reference and --candidate; the profile's endpoints. Out: the model, its reference and
candidates (`Comparison`), each with its folder, its server or both. May import whatever the command line may; only commands
import it.
"""
