// Server-sent events of an answer to a POST, which EventSource cannot send.

import { ask, send, type GenerateEvent, type GenerateRequest } from './api'

/** The events as they come; abort the signal to leave, and the server stops its work. */
export async function* generate(request: GenerateRequest, signal: AbortSignal): AsyncGenerator<GenerateEvent> {
  const answer = await ask('generate', send(request, signal))
  if (answer.body === null) return
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader()
  let rest = ''
  for (;;) {
    const { done, value } = await reader.read()
    if (done) return
    const events = (rest + value).split('\n\n')
    rest = events.pop() ?? ''
    for (const event of events) {
      if (event.startsWith('data: ')) yield JSON.parse(event.slice('data: '.length)) as GenerateEvent
    }
  }
}
