"""x"""
def grade(outcome): return 0.0
