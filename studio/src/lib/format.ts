// Numbers and tokens as people read them.

const UNITS = ['', ' k', ' M', ' G', ' T', ' P', ' E', ' Z']

/** 1234567 → "1.23 M". */
export function short(value: number, unit = ''): string {
  if (value === 0) return unit === '' ? '0' : `0 ${unit}`
  const power = Math.min(Math.max(Math.floor(Math.log10(Math.abs(value)) / 3), 0), UNITS.length - 1)
  const scaled = value / 1000 ** power
  const digits = power === 0 && Number.isInteger(value) ? String(value) : scaled.toPrecision(3)
  const prefix = UNITS[power] ?? ''
  return unit === '' ? digits + prefix : `${digits}${prefix === '' ? ' ' : prefix}${unit}`
}

/** Always so many digits behind the point; "–" for what is not there. */
export function fixed(value: number | null | undefined, digits = 3): string {
  return value === null || value === undefined ? '–' : value.toFixed(digits)
}

/** Unix seconds → "3 min ago". */
export function ago(seconds: number): string {
  const past = Date.now() / 1000 - seconds
  if (past < 2) return 'now'
  if (past < 86400) return `${duration(past)} ago`
  return new Date(seconds * 1000).toISOString().slice(0, 10)
}

/** 12345 → "12,345". */
export const whole = (value: number) => value.toLocaleString('en-US')

export function percent(share: number | null | undefined, digits = 1): string {
  return share === null || share === undefined ? '–' : `${(100 * share).toFixed(digits)} %`
}

/** 3725 → "1 h 2 min". */
export function duration(seconds: number): string {
  if (seconds < 60) return `${Math.round(seconds)} s`
  const minutes = Math.round(seconds / 60)
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`
}

/** A token's text with its spaces and line ends made visible. */
export function visible(text: string): string {
  return text === '' ? '∅' : text.replaceAll(' ', '·').replaceAll('\n', '⏎').replaceAll('\t', '⇥')
}
