// Colours of blocks come from the server; here is what is made of them. A path has the mean of its blocks' colours in OKLab,
// so that paths which share blocks look alike.

type Triple = [number, number, number]

function linear(channel: number): number {
  return channel <= 0.04045 ? channel / 12.92 : ((channel + 0.055) / 1.055) ** 2.4
}

function toLinear(hex: string): Triple {
  const value = parseInt(hex.slice(1), 16)
  return [(value >> 16) & 255, (value >> 8) & 255, value & 255].map((channel) => linear(channel / 255)) as Triple
}

function toOklab(hex: string): Triple {
  const [r, g, b] = toLinear(hex)
  const l = Math.cbrt(0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b)
  const m = Math.cbrt(0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b)
  const s = Math.cbrt(0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b)
  return [
    0.2104542553 * l + 0.793617785 * m - 0.0040720468 * s,
    1.9779984951 * l - 2.428592205 * m + 0.4505937099 * s,
    0.0259040371 * l + 0.7827717662 * m - 0.808675766 * s,
  ]
}

/** The colour of a path, for CSS. */
export function colorOfPath(path: number[], colors: string[]): string {
  const sum: Triple = [0, 0, 0]
  for (const block of path) {
    const own = toOklab(colors[block] ?? '#808080')
    for (const axis of [0, 1, 2] as const) sum[axis] += own[axis] / path.length
  }
  return `oklab(${sum.map((value) => value.toFixed(4)).join(' ')})`
}

/** Black or white, whichever is read better on a colour (WCAG's relative luminance). */
export function inkOn(hex: string): '#000000' | '#ffffff' {
  const [r, g, b] = toLinear(hex)
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? '#000000' : '#ffffff'
}
