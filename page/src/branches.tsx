// The branch tree of a session as a picture: a row for each turn, a column for each line of turns.

import { useMemo } from "preact/hooks"
import { KINDS } from "./conversation"
import type { Turn } from "./model"
import { turnKey } from "./model"
import { count, line } from "./text"

interface Dot {
    turn: Turn
    row: number
    column: number
    parent: Dot | null
}

export function layout(turns: Turn[]): { dots: Dot[]; columns: number } {
    const dots: Dot[] = []
    const byKey = new Map<string, Dot>()
    const ends: (Dot | null)[] = [] // the last dot of each column
    const lastChild = new Map<string, number>()
    turns.forEach((turn, row) => {
        if (turn.parent !== null) lastChild.set(turnKey({ index: turn.parent, model: turn.model }), row)
    })
    const rooted = turns.some((turn) => turn.kind === "main" && !turn.model)
    if (rooted) ends.push(null) // the first column is reserved for the main conversation
    const latest = (fits: (turn: Turn) => boolean) => [...dots].reverse().find((dot) => !dot.turn.model && fits(dot.turn)) ?? null
    turns.forEach((turn, row) => {
        const from = turn.parent ?? (turn.cause !== null ? turn.forked_from : null)
        let parent = from === null ? null : byKey.get(turnKey({ index: from, model: turn.model })) ?? null
        // A turn that begins a conversation of its own is drawn as a child of the last turn of a conversation above it
        // or, after a compaction, of the last turn of the previous compaction at the same depth.
        if (!parent && turn.kind === "compaction") parent = latest((other) => other.kind === "compaction" && other.depth === turn.depth)
        if (!parent && (turn.kind === "subagent" || turn.model)) parent = latest((other) => other.depth < Math.max(1, turn.depth) && other.kind !== "auxiliary")
        let column = turn.parent !== null && parent && ends[parent.column] === parent && parent.turn.kind === turn.kind ? parent.column : -1
        if (rooted && turn.kind === "main" && !turn.model && ends[0] === null) column = 0
        if (column < 0) {
            // a column can be reused if its last turn has no later child and is not this turn's parent
            column = ends.findIndex((end, at) => at > 0 && end !== null && (lastChild.get(turnKey(end.turn)) ?? -1) < row && end !== parent && turn.kind !== "main")
            if (column < 0) column = ends.length
        }
        const dot = { turn, row, column, parent }
        ends[column] = dot
        byKey.set(turnKey(turn), dot)
        dots.push(dot)
    })
    return { dots, columns: Math.max(1, ends.length) }
}

const ROW = 26
const WIDE = 14
export function Branches({ turns, chosen, choose }: { turns: Turn[]; chosen: string | null; choose: (key: string) => void }) {
    const { dots, columns } = useMemo(() => layout(turns), [turns])
    const step = Math.min(WIDE, 110 / columns)
    const x = (column: number) => 12 + column * step
    const y = (row: number) => row * ROW + ROW / 2
    const width = 16 + columns * step
    return (
        <nav class="branches" aria-label="Turns and branches" style={{ "--graph": `${width}px` }}>
            <svg width={width} height={turns.length * ROW} aria-hidden="true">
                {dots.map((dot) => dot.parent && (
                    <path key={`l${dot.row}`} class={`edge ${KINDS[dot.turn.kind] ?? "k-main"}${dot.turn.parent === null ? " loose" : ""}`}
                        d={dot.parent.column === dot.column ? `M${x(dot.column)} ${y(dot.parent.row)}V${y(dot.row)}`
                            : `M${x(dot.parent.column)} ${y(dot.parent.row)}C${x(dot.parent.column)} ${y(dot.parent.row) + ROW},${x(dot.column)} ${y(dot.parent.row)},${x(dot.column)} ${Math.min(y(dot.parent.row) + ROW, y(dot.row))}V${y(dot.row)}`} />
                ))}
                {dots.map((dot) => (
                    <circle key={`d${dot.row}`} cx={x(dot.column)} cy={y(dot.row)} r={dot.turn.parent === null ? 5 : 4}
                        class={`dot ${KINDS[dot.turn.kind] ?? "k-main"}${dot.turn.finish === "abort" ? " hollow" : ""}`} />
                ))}
            </svg>
            <ol>
                {dots.map(({ turn }) => {
                    const key = turnKey(turn)
                    const what = turn.tokens?.reply?.tool_calls?.[0]?.name
                    return (
                        <li key={key} style={{ height: `${ROW}px` }}>
                            <button type="button" class={chosen === key ? "chosen" : ""} aria-current={chosen === key ? "true" : undefined} onClick={() => choose(key)}>
                                <b>{turn.index}</b>
                                <span class={`name ${KINDS[turn.kind] ?? ""}`}>{turn.kind === "main" ? what ? line(what, 30) : turn.tool_calls ? "tool call" : line(turn.sampled.slice(0, 1000).replace(/<[^>]*>/g, ""), 40) || "reply"
                                    : `${turn.kind}${turn.label ? ` ${line(turn.label, 20)}` : ""}`}</span>
                                <span class="dim">{count(turn.output_tokens)}</span>
                            </button>
                        </li>
                    )
                })}
            </ol>
        </nav>
    )
}
