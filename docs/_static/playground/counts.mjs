/** Trainable parameters of the methods; tests/test_playground.py compares them with the package. */

const phm = (a, b, n) => (a * b) / n // Kronecker factors; a rule of n³ comes once or for each layer

export const COUNTS = {
  "static prompt": ({d, t}) => t * d,
  "S-IDPG-PHM": ({d, t, m, n}) => phm(d, m, n) + m + phm(m, t * d, n) + t * d + n ** 3,
  "M-IDPG-PHM": ({d, t, m, n, L}) => phm(d, m, n) + m + phm(m, t * d, n) + t * d * L + 2 * n ** 3,
  "S-IDPG, plain matrices": ({d, t, m}) => m * (d + 1) + t * d * (m + 1),
  "LPT w/ NPG": ({d, t, m}) => m * d + m + t * d * m + t * d,
  "ID-SPAM": ({d, t, m}) => 3 * d * d + d * m + m * t * d,
}

export function count(method, sizes) {
  return COUNTS[method](sizes)
}
