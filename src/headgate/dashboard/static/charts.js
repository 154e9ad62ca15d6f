// The charts of the overview. The figures come from /ui/history; colours are those of the sheet, so
// that a change of theme draws anew. Without this file the table below the charts says the same.
"use strict";

(function () {
  const FETCH_MS = { hour: 5000, day: 60000 };
  const PATIENCE_MS = 10000;
  const HEIGHT = 150;
  const LEAST_SECONDS = 300;
  // The last time on the axis stands half beyond the end of the chart.
  const SIDE_PADDING = 20;
  const TOP_PADDING = 10;
  const CHARTS = {
    depth: [["queued", "queued", "--wait"], ["inflight", "in flight", "--run"]],
    ended: [["completed", "completed", "--good"], ["failed", "failed", "--bad"]],
    wait: [["waitAverage", "average", "--run"], ["wait95", "95 %", "--warn"]],
    spent: [["spentUsd", "dollars", "--run"]],
  };
  // A second line is dashed, so that lines are told apart without their colours.
  const DASHES = [[], [5, 4]];
  const LENGTHS = [[3600, "h"], [60, "min"], [1, "s"], [0.001, "ms"]];
  const drawn = new Map();
  let range = "hour";
  let figures = null;
  let timer = null;

  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  function shown(value) {
    if (value === null || value === undefined) return "–";
    return value.toLocaleString("en", { maximumSignificantDigits: 3 });
  }

  // Waits go from milliseconds to hours, so each is said in its own unit.
  function lasting(seconds) {
    if (seconds === null || seconds === undefined) return "–";
    if (seconds === 0) return "0";
    const [size, unit] = LENGTHS.find(([length]) => seconds >= length) || LENGTHS.at(-1);
    return `${shown(seconds / size)} ${unit}`;
  }

  function options(name, place, isHidden) {
    const written = name === "wait" ? lasting : shown;
    const axis = {
      gap: 5,
      stroke: colour("--soft"),
      grid: { stroke: colour("--line"), width: 1 },
      ticks: { stroke: colour("--line"), width: 1 },
      font: "12px system-ui",
    };
    return {
      width: place.clientWidth,
      height: HEIGHT,
      padding: [TOP_PADDING, SIDE_PADDING, 0, 0],
      cursor: { drag: { x: false, y: false } },
      legend: { live: true },
      scales: {
        x: { range: (chart) => span(chart.data[0]) },
        y: { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] },
      },
      axes: [
        { ...axis, space: 70, values: (_, splits) => splits.map(clock) },
        { ...axis, size: labelWidth, values: (_, splits) => splits.map(written) },
      ],
      series: [
        { label: "at", value: (_, at) => clock(at) },
        ...CHARTS[name].map(([, label, tone], nth) => ({
          label,
          show: !isHidden[nth],
          stroke: colour(tone),
          width: 2,
          dash: DASHES[nth],
          // A single figure makes no line.
          points: { show: (chart) => chart.data[0].length === 1, fill: colour(tone), size: 6 },
          value: (_, value) => written(value),
        })),
      ],
    };
  }

  // An axis is as wide as its longest label, so that none is cut off.
  function labelWidth(chart, labels, which, round) {
    const axis = chart.axes[which];
    // uPlot asks again while the chart settles; another answer each time would never end that.
    if (round > 1) return axis._size;
    chart.ctx.font = axis.font[0];
    const widths = (labels || []).map((one) => chart.ctx.measureText(one).width);
    return Math.ceil(axis.ticks.size + axis.gap + Math.max(0, ...widths) / devicePixelRatio);
  }

  // A few figures of a fresh service stand at the right end, not all over the chart. The ends are
  // those of the figures: of a single one uPlot makes up another, far in the future.
  function span(times) {
    const end = times.length ? times.at(-1) : Date.now() / 1000;
    return [Math.min(times.length ? times[0] : end, end - LEAST_SECONDS), end];
  }

  function clock(at) {
    if (at === null || at === undefined) return "–";
    const time = new Date(at * 1000);
    return [time.getHours(), time.getMinutes()].map((one) => String(one).padStart(2, "0")).join(":");
  }

  function data(name) {
    return [figures.at, ...CHARTS[name].map(([column]) => figures[column])];
  }

  function draw(isAnew) {
    if (!figures) return;
    document.querySelectorAll("[data-chart]").forEach((place) => {
      const name = place.dataset.chart;
      const known = drawn.get(name);
      if (known && !isAnew) {
        known.setData(data(name));
      } else {
        // What somebody has hidden with the legend stays hidden in other colours.
        const isHidden = known ? known.series.slice(1).map((one) => !one.show) : [];
        if (known) known.destroy();
        drawn.set(name, new uPlot(options(name, place, isHidden), data(name), place));
      }
      showLast(drawn.get(name));
    });
  }

  // Unless somebody points at a moment, the legend has the latest figures.
  function showLast(chart) {
    // The chart draws itself when this script has ended, and its legend with it.
    setTimeout(() => {
      const isPointedAt = chart.cursor.idx !== null && chart.cursor.idx !== undefined;
      if (!isPointedAt && chart.data[0].length) {
        chart.setLegend({ idx: chart.data[0].length - 1 });
      }
    });
  }

  async function fetched(asked) {
    const signal = AbortSignal.timeout(PATIENCE_MS);
    try {
      const answer = await fetch(`/ui/history?range=${asked}`, { signal });
      return answer.ok ? await answer.json() : null;
    } catch {
      // The service is away; the page says so, and the next try is soon.
      return null;
    }
  }

  async function fetchFigures() {
    clearTimeout(timer);
    const asked = range;
    const found = document.hidden ? null : await fetched(asked);
    // Who has chosen the other range meanwhile waits for that, and its own answer comes.
    if (asked !== range) return;
    if (found) {
      figures = found;
      draw(false);
    }
    clearTimeout(timer);
    timer = setTimeout(fetchFigures, FETCH_MS[range]);
  }

  function choose(button) {
    range = button.dataset.range;
    document.querySelectorAll("[data-range]").forEach((one) => {
      one.setAttribute("aria-pressed", String(one === button));
    });
    fetchFigures();
  }

  document.addEventListener("DOMContentLoaded", () => {
    document.querySelectorAll("[data-ranges]").forEach((one) => {
      one.hidden = false;
    });
    document.addEventListener("click", (event) => {
      const button = event.target instanceof Element && event.target.closest("[data-range]");
      if (button) choose(button);
    });
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden) fetchFigures();
    });
    document.addEventListener("headgate:theme", () => draw(true));
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(true));
    new ResizeObserver(() => {
      drawn.forEach((chart, name) => {
        const place = document.querySelector(`[data-chart="${name}"]`);
        if (place && place.clientWidth !== chart.width) {
          chart.setSize({ width: place.clientWidth, height: HEIGHT });
        }
      });
    }).observe(document.body);
    fetchFigures();
  });
})();
