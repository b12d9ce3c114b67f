// Colours thinned towards the page's ground, as hex, so that `inkOn` can say which ink is read on them.

const dark = window.matchMedia('(prefers-color-scheme: dark)')
const theme = $state({ dark: dark.matches })
dark.addEventListener('change', () => {
  theme.dark = dark.matches
})

const channels = (hex: string) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16))

/** So much of a colour over the ground of panels (`--raised` in app.css); without a colour, of ink. */
export function thinned(hex: string | undefined, share: number): string {
  const ground = channels(theme.dark ? '#1e2023' : '#ffffff')
  const full = channels(hex ?? (theme.dark ? '#ecebe8' : '#1c1b1a'))
  const kept = Math.min(Math.max(share, 0), 1)
  const mixed = full.map((channel, axis) => Math.round(channel * kept + (ground[axis] ?? 0) * (1 - kept)))
  return `#${mixed.map((channel) => channel.toString(16).padStart(2, '0')).join('')}`
}
