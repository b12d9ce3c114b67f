// Just enough Markdown for tables and notes that programs write: headings, paragraphs, lists, tables, code; in a line, code,
// bold, and links as their text. The rest stays as it is written. Nothing here makes HTML: what comes out is drawn as text.

export interface Span {
  kind: 'text' | 'code' | 'bold'
  text: string
}

export type Block =
  | { kind: 'heading'; level: number; spans: Span[] }
  | { kind: 'paragraph'; spans: Span[] }
  | { kind: 'list'; ordered: boolean; items: Span[][] }
  | { kind: 'table'; head: Span[][]; rows: Span[][][] }
  | { kind: 'code'; text: string }

const INLINE = /`([^`]+)`|\*\*([^*]+)\*\*|!?\[([^\]]*)\]\([^)\s]*(?:\s+"[^"]*")?\)/g

export function inline(text: string): Span[] {
  const spans: Span[] = []
  let from = 0
  for (const found of text.matchAll(INLINE)) {
    if (found.index > from) spans.push({ kind: 'text', text: text.slice(from, found.index) })
    const [all, code, bold, link] = found
    if (code !== undefined) spans.push({ kind: 'code', text: code })
    else if (bold !== undefined) spans.push({ kind: 'bold', text: bold })
    else spans.push({ kind: 'text', text: link ?? '' })
    from = found.index + all.length
  }
  if (from < text.length) spans.push({ kind: 'text', text: text.slice(from) })
  return spans
}

export const plainText = (spans: Span[]) => spans.map(({ text }) => text).join('')

const FENCE = /^\s*```/
const HEADING = /^(#{1,6})\s+(.*)$/
const ITEM = /^\s*([-*+]|\d+[.)])\s+(.*)$/
const ROW = /^\s*\|/
const RULE = /^\s*\|?[\s:|-]*-[\s:|-]*$/

// A bar behind a backslash belongs to its cell.
function cells(line: string): Span[][] {
  const inner = line
    .trim()
    .replace(/^\|/, '')
    .replace(/(?<!\\)\|$/, '')
  return inner.split(/(?<!\\)\|/).map((cell) => inline(cell.replaceAll('\\|', '|').trim()))
}

export function parse(markdown: string): Block[] {
  const lines = markdown.split(/\r?\n/)
  const blocks: Block[] = []
  let at = 0
  const line = () => lines[at] ?? ''
  const inside = () => at < lines.length
  const begins = (text: string) => FENCE.test(text) || HEADING.test(text) || ITEM.test(text) || ROW.test(text)

  while (inside()) {
    const heading = HEADING.exec(line())
    if (line().trim() === '') at++
    else if (heading) {
      blocks.push({ kind: 'heading', level: (heading[1] ?? '').length, spans: inline(heading[2] ?? '') })
      at++
    } else if (FENCE.test(line())) {
      const code: string[] = []
      for (at++; inside() && !FENCE.test(line()); at++) code.push(line())
      at++
      blocks.push({ kind: 'code', text: code.join('\n') })
    } else if (ROW.test(line()) && RULE.test(lines[at + 1] ?? '')) {
      const head = cells(line())
      const rows: Span[][][] = []
      for (at += 2; inside() && ROW.test(line()); at++) rows.push(cells(line()))
      blocks.push({ kind: 'table', head, rows })
    } else if (ITEM.test(line())) {
      const ordered = /^\s*\d/.test(line())
      const items: string[] = []
      // A line further in belongs to the item above it.
      for (; inside() && line().trim() !== '' && (ITEM.test(line()) || /^\s/.test(line())); at++) {
        const item = ITEM.exec(line())
        if (item) items.push(item[2] ?? '')
        else items.push(`${items.pop() ?? ''} ${line().trim()}`)
      }
      blocks.push({ kind: 'list', ordered, items: items.map(inline) })
    } else {
      const text = [line().trim()]
      for (at++; inside() && line().trim() !== '' && !begins(line()); at++) text.push(line().trim())
      blocks.push({ kind: 'paragraph', spans: inline(text.join(' ')) })
    }
  }
  return blocks
}
