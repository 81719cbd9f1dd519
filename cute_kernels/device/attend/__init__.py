"""One tile: scores, softmax, and the state that a piece leaves."""
