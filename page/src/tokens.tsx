// The tokens of a turn, coloured by origin, log-probability or policy version. Ids and numbers are in the tooltip.

import { useEffect, useMemo, useRef, useState } from "preact/hooks"
import type { Sample, Turn } from "./model"
import { count, number, visible } from "./text"
import { noTip, tip } from "./ui"

export type Colour = "origin" | "logprob" | "version"
export type Origin = "prompt" | "trained" | "masked" | "dropped" | "sampled"

/** Return a function with the fate of the sampled token at a position of a turn. Every fate is "sampled" until the
 * session has samples, and "dropped" for turns of other models than the policy. */
export function fates(samples: Sample[] | null): ((turn: Turn, at: number) => Origin) {
    if (!samples) return () => "sampled"
    const masks = new Map<number, Int8Array>()
    const spans = new Map<number, { sample: Sample; start: number }[]>()
    return (turn, at) => {
        if (turn.model) return "dropped"
        let known = masks.get(turn.index)
        if (!known) {
            known = new Int8Array(turn.output_tokens)
            for (const { sample, start } of spansOf(turn)) {
                for (let i = 0; i < known.length; i++) known[i] = Math.max(known[i], 1 + (sample.loss_mask[start + i] ?? 0))
            }
            masks.set(turn.index, known)
        }
        return known[at] === 2 ? "trained" : known[at] === 1 ? "masked" : "dropped"
    }
    function spansOf(turn: Turn) {
        let found = spans.get(turn.index)
        if (!found) {
            found = []
            for (const sample of samples!) {
                const place = sample.turns.indexOf(turn.index)
                // the row begins with the turn's whole prompt, so its sampled tokens come after prompt_tokens ids
                if (place >= 0) found.push({ sample, start: turn.prompt_tokens })
            }
            spans.set(turn.index, found)
        }
        return found
    }
}

const LEVELS: [number, string][] = [[-0.05, "lp0"], [-0.3, "lp1"], [-1, "lp2"], [-2.5, "lp3"], [-5, "lp4"]]
export const levelOf = (logprob: number) => LEVELS.find(([from]) => logprob >= from)?.[1] ?? "lp5"
export const LEGENDS: Record<Colour, [string, string][]> = {
    origin: [["prompt", "prompt"], ["trained", "sampled, trains"], ["masked", "sampled, masked"], ["dropped", "sampled, dropped"], ["sampled", "sampled"]],
    logprob: [["lp0", "> 95 %"], ["lp1", "> 74 %"], ["lp2", "> 37 %"], ["lp3", "> 8 %"], ["lp4", "> 0.7 %"], ["lp5", "less"], ["prompt", "prompt"]],
    version: [],
}
const BEFORE = 120
const FIRST = 600
const STEP = 6000

function shown(piece: string): string {
    if (piece === "") return "·"
    return visible(piece).replace(/\n/g, "↵\n").replace(/\t/g, "⇥\t")
}

export function TurnTokens({ turn, colour, fate }: { turn: Turn; colour: Colour; fate: (turn: Turn, at: number) => Origin }) {
    const box = useRef<HTMLDivElement>(null)
    const [seen, setSeen] = useState(false)
    const tokens = turn.tokens!
    const prompt = tokens.prompt_delta.length
    const all = prompt + tokens.output_ids.length
    // of a long prompt, only the end is shown at first, next to the reply
    const [from, setFrom] = useState(Math.max(0, prompt - (prompt > 2 * BEFORE ? BEFORE : prompt)))
    const [to, setTo] = useState(Math.min(all, prompt + 2 * FIRST))
    useEffect(() => {
        const observer = new IntersectionObserver((entries) => {
            if (entries.some((entry) => entry.isIntersecting)) setSeen(true)
        }, { rootMargin: "600px" })
        observer.observe(box.current!)
        return () => observer.disconnect()
    }, [])
    useEffect(() => setTo((old) => Math.max(old, Math.min(all, prompt + 2 * FIRST))), [all])
    const versionAt = (at: number) => turn.versions.find((span) => span.start <= at && at < span.end)?.version
    const body = useMemo(() => {
        if (!seen) return null
        const spans = []
        for (let at = from; at < to; at++) {
            const own = at - prompt
            const piece = own < 0 ? tokens.prompt_pieces?.[at] : tokens.output_pieces?.[own]
            const id = own < 0 ? tokens.prompt_delta[at] : tokens.output_ids[own]
            let tone = "prompt"
            if (own >= 0)
                tone = colour === "origin" ? fate(turn, own) : colour === "logprob"
                    ? own < tokens.logprobs.length ? levelOf(tokens.logprobs[own]) : "sampled" : `v${(versionAt(own) ?? 0) % 6}`
            spans.push(<span key={at} data-at={at} class={`t ${tone}`}>{piece === undefined ? `${id} ` : shown(piece)}</span>)
        }
        return spans
    }, [seen, from, to, turn, colour, fate, tokens])
    const hover = (event: MouseEvent) => {
        const given = (event.target as HTMLElement).dataset.at
        if (given === undefined) return noTip()
        const at = Number(given), own = at - prompt
        const piece = own < 0 ? tokens.prompt_pieces?.[at] : tokens.output_pieces?.[own]
        const rows: [string, string][] = [["id", String(own < 0 ? tokens.prompt_delta[at] : tokens.output_ids[own])],
            ["position", count(turn.prompt_tokens - prompt + at)]]
        if (own >= 0) {
            rows.push(["origin", fate(turn, own)])
            const logprob = tokens.logprobs[own]
            if (logprob !== undefined) rows.push(["log-probability", `${number(logprob)} (${(Math.exp(logprob) * 100).toPrecision(3)} %)`])
            const version = versionAt(own)
            if (version !== undefined) rows.push(["policy version", String(version)])
        } else rows.push(["origin", "prompt"])
        tip(event, piece === undefined ? "" : JSON.stringify(visible(piece)), rows)
    }
    return (
        <div class="tokens" ref={box} onMouseOver={hover} onMouseLeave={noTip} style={seen ? undefined : { minHeight: "4rem" }}>
            {from > 0 && <button type="button" class="quiet" onClick={() => setFrom(Math.max(0, from - STEP))}>show {count(Math.min(STEP, from))} of {count(from)} prompt tokens before</button>}
            <div class="flow" dir="ltr">{body}</div>
            {to < all && <button type="button" class="quiet" onClick={() => setTo(Math.min(all, to + STEP))}>show {count(Math.min(STEP, all - to))} of {count(all - to)} tokens after</button>}
        </div>
    )
}
