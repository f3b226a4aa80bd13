"""From logits to tokens: parameters, adjustments, grammars, the draw, beams and reported log-probabilities."""
