// Formats texts and numbers. In texts of agents, invisible characters and characters that change the order of the text
// around them are replaced by their code points.

const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u115f\u1160\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\ufff9-\ufffb]|[\u{e0000}-\u{e007f}]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/gu
const KEPT = /\ufe0f|\u200d/u // parts of emoji, which are kept after an emoji character

function written(char: string, at: number, whole: string): string {
    if (KEPT.test(char) && /\p{Extended_Pictographic}/u.test(whole.slice(Math.max(0, at - 3), at))) return char
    const code = char.codePointAt(0)!
    return `\u27e8U+${code.toString(16).toUpperCase().padStart(4, "0")}\u27e9`
}

export function visible(text: string): string {
    return text.replace(/\r\n/g, "\n").replace(CONTROL, (char, at, whole) => written(char, at, whole))
}

/** One line of at most `most` characters. */
export function line(text: string, most = 160): string {
    const flat = visible(text.slice(0, most * 2)).replace(/\s+/g, " ").trim()
    return flat.length > most || text.length > most * 2 ? `${flat.slice(0, most)}…` : flat
}

export function count(value: number | null | undefined): string {
    if (value === null || value === undefined || !isFinite(value)) return "–"
    const size = Math.abs(value)
    if (size >= 1e9) return `${(value / 1e9).toFixed(1)}G`
    if (size >= 1e6) return `${(value / 1e6).toFixed(1)}M`
    if (size >= 1e4) return `${(value / 1e3).toFixed(1)}k`
    return Number.isInteger(value) ? String(value) : value.toFixed(size < 10 ? 2 : size < 1000 ? 1 : 0)
}

export function number(value: number | null | undefined): string {
    if (value === null || value === undefined || !isFinite(value)) return "–"
    return String(Number(value.toFixed(3)))
}

export function bytes(value: number): string {
    if (value >= 1 << 20) return `${(value / (1 << 20)).toFixed(1)} MiB`
    if (value >= 1 << 10) return `${(value / (1 << 10)).toFixed(1)} KiB`
    return `${value} B`
}

export function seconds(value: number | null | undefined): string {
    if (value === null || value === undefined || !isFinite(value)) return "–"
    if (value < 0.0995) return `${Math.round(value * 1000)} ms`
    if (value < 10) return `${value.toFixed(value < 1 ? 2 : 1)} s`
    if (value < 90) return `${Math.round(value)} s`
    const whole = Math.round(value)
    if (value < 5400) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")}`
    if (value < 172800) return `${(value / 3600).toFixed(1)} h`
    return `${(value / 86400).toFixed(1)} d`
}

export function ago(at: number, now = Date.now() / 1000): string {
    const gone = Math.max(0, now - at)
    if (gone < 2) return "now"
    if (gone < 90) return `${Math.round(gone)} s ago`
    if (gone < 5400) return `${Math.round(gone / 60)} min ago`
    if (gone < 129600) return `${Math.round(gone / 3600)} h ago`
    return `${Math.round(gone / 86400)} d ago`
}

export const clock = (at: number) => new Date(at * 1000).toLocaleString(undefined, { hour12: false })
export const plural = (n: number, word: string) => `${count(n)} ${word}${n === 1 ? "" : "s"}`
