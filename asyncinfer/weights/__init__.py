from asyncinfer.weights.progress import LoadProgress, OnProgress

__all__ = ["LoadProgress", "OnProgress"]
