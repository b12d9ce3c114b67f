// What the picture shows, in a sentence.

import type { Layout } from '../lib/api'

interface Question {
  num_tokens: number
  window_size: number
  num_depths: number
  token: number
}

const range = (first: number, last: number) => (first === last ? `only token ${last}` : `tokens ${first}–${last}`)

export function sentence({ num_depths, token }: Question, layout: Layout): string {
  const first = layout.reach?.[0]?.start ?? token
  const own = layout.reach?.at(-1)?.start ?? token
  const through = num_depths === 1 ? 'the core’s one depth' : `the core’s ${num_depths} depths`
  const share = first === 0 ? 'all up to itself' : `${token - first + 1} of the ${token + 1} up to itself`
  const alone =
    num_depths === 1
      ? ''
      : own === first
        ? ` The last depth alone reaches as far: further back nothing reaches this token.`
        : ` The last depth alone reaches ${range(own, token)}.`
  return (
    `Token ${token} sees ${range(first, token)} through ${through} (${share}).${alone}` +
    ` Without the core’s depths, prelude and coda attend to every earlier token, 0–${token}.`
  )
}
