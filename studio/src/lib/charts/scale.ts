// From numbers to pixels, and the round numbers to write beside them.

export interface Scale {
  (value: number): number
  invert: (pixel: number) => number
  ticks: number[]
}

export type Span = [number, number]

/** The smallest span that holds all of the values (nulls aside), never an empty one. */
export function spanOf(values: Iterable<number | null>): Span {
  let low = Infinity
  let high = -Infinity
  for (const value of values) {
    if (value === null) continue
    low = Math.min(low, value)
    high = Math.max(high, value)
  }
  if (low > high) return [0, 1]
  return low === high ? [low - 0.5, high + 0.5] : [low, high]
}

/** A little air around a span. */
export function padded([low, high]: Span, share = 0.06): Span {
  const air = (high - low) * share
  return [low - air, high + air]
}

function roundStep(rough: number): number {
  const power = 10 ** Math.floor(Math.log10(rough))
  return ([1, 2, 5, 10].find((step) => step * power >= rough) ?? 10) * power
}

export function linear([low, high]: Span, [from, to]: Span, room = 60): Scale {
  const slope = (to - from) / (high - low)
  const count = Math.max(2, Math.abs(to - from) / room)
  const step = roundStep((high - low) / count)
  const ticks: number[] = []
  for (let index = Math.ceil(low / step); index * step <= high + step * 1e-6; index++) ticks.push(index * step)
  return Object.assign((value: number) => from + (value - low) * slope, {
    invert: (pixel: number) => low + (pixel - from) / slope,
    ticks,
  })
}

export function logarithmic([low, high]: Span, range: Span): Scale {
  const inner = linear([Math.log10(low), Math.log10(high)], range)
  const decades = Math.log10(high / low)
  const mantissas = decades > 4 ? [1] : decades > 1.5 ? [1, 3] : [1, 2, 3, 5, 7]
  const ticks: number[] = []
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power++)
    for (const mantissa of mantissas) ticks.push(mantissa * 10 ** power)
  return Object.assign((value: number) => inner(Math.log10(value)), {
    invert: (pixel: number) => 10 ** inner.invert(pixel),
    ticks: ticks.filter((tick) => tick >= low && tick <= high),
  })
}

/** The index of the stop nearest to a value, of stops in rising order. */
export function nearest(stops: number[], value: number): number {
  const after = stops.findIndex((stop) => stop >= value)
  if (after === -1) return stops.length - 1
  const before = Math.max(after - 1, 0)
  return value - (stops[before] ?? 0) < (stops[after] ?? 0) - value ? before : after
}
