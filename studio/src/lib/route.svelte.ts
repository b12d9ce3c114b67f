// Where the page is: the part behind # of its address, as in #/runs/demo. Going back in the browser goes back here.

/** What stands behind a % may be no character. */
function decode(part: string): string {
  try {
    return decodeURIComponent(part)
  } catch {
    return part
  }
}

function read(): string[] {
  return location.hash.replace(/^#\/?/, '').split('/').filter(Boolean).map(decode)
}

export const route = $state({ parts: read() })

window.addEventListener('hashchange', () => {
  route.parts = read()
})

export const link = (...parts: string[]) => `#/${parts.map(encodeURIComponent).join('/')}`
