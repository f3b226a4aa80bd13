"""From logits to tokens: parameters, adjustments, grammars, the draw and beams. Knows no request and no
scheduling."""
