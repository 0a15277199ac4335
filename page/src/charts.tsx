import { useEffect, useRef } from "preact/hooks"
import uPlot from "uplot"
import { count } from "./text"

const color = (name: string) => getComputedStyle(document.documentElement).getPropertyValue(name).trim()

export interface Curve {
    name: string
    values: (number | null)[]
    tone: string
    fill?: boolean
    points?: boolean
}

/** Curves over time. `at` are seconds since the epoch. */
export function Chart({ title, at, curves, height = 120, theme, range }: {
    title: string; at: number[]; curves: Curve[]; height?: number; theme: string; range?: [number, number]
}) {
    const box = useRef<HTMLDivElement>(null)
    const plot = useRef<uPlot | null>(null)
    const shape = `${curves.map((curve) => curve.name + curve.tone).join()}|${theme}|${height}`
    useEffect(() => {
        const area = box.current! // the reference is empty when the chart is removed
        const size = () => ({ width: area.clientWidth, height })
        const axis = { stroke: color("--dim"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" }
        const made = new uPlot(
            {
                ...size(),
                padding: [8, 8, 0, 0],
                legend: { show: false },
                cursor: { points: { size: 6 }, drag: { x: false, y: false }, y: false },
                scales: { y: { range: range ?? ((_, low, high) => [Math.min(0, low), high > 0 ? high * 1.12 : 1]) } },
                axes: [
                    { ...axis, size: 24, space: 60, grid: { show: false }, values: [[3600, "{HH}:{mm}", null, null, null, null, null, null, 1], [60, "{HH}:{mm}", null, null, null, null, null, null, 1], [1, "{HH}:{mm}:{ss}", null, null, null, null, null, null, 1]] },
                    { ...axis, size: 40, space: 28, values: (_, ticks) => ticks.map((tick) => count(tick)) },
                ],
                series: [
                    {},
                    ...curves.map((curve) => ({
                        label: curve.name,
                        stroke: color(`--${curve.tone}`),
                        width: 1.5,
                        fill: curve.fill ? `${color(`--${curve.tone}`)}22` : undefined,
                        points: { show: curve.points ?? false, size: 5 },
                        spanGaps: true,
                    })),
                ],
            },
            [at, ...curves.map((curve) => curve.values)] as uPlot.AlignedData,
            area,
        )
        plot.current = made
        const observer = new ResizeObserver(() => made.setSize(size()))
        observer.observe(area)
        return () => {
            observer.disconnect()
            made.destroy()
            plot.current = null
        }
    }, [shape])
    useEffect(() => plot.current?.setData([at, ...curves.map((curve) => curve.values)] as uPlot.AlignedData), [at, curves])
    const latest = (curve: Curve) => [...curve.values].reverse().find((value) => value !== null)
    const spoken = curves.map((curve) => `${curve.name} ${count(latest(curve))}`).join(", ")
    return (
        <figure class="chart">
            <figcaption>
                <span>{title}</span>
                <span class="legend">
                    {curves.map((curve) => (
                        <span key={curve.name}><i class={`dot ${curve.tone}`} />{curve.name} <b>{count(latest(curve))}</b></span>
                    ))}
                </span>
            </figcaption>
            <div ref={box} role="img" aria-label={`${title}: ${spoken}`} />
        </figure>
    )
}
