//! The picture: throughput against value size, both modes, beside the founding figures.

use std::ops::Range;
use std::path::Path;

use anyhow::{Context, Result, anyhow};
use plotters::coord::Shift;
use plotters::coord::combinators::WithKeyPoints;
use plotters::element::DashedPathElement;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::format::bytes;
use crate::measure::Operation;
use crate::report::{Mode, Report, Wait};

const SIZE: (u32, u32) = (1200, 640);
/// A panel each.
const SHOWN: [Operation; 2] = [Operation::Put, Operation::Get];
const FONT: &str = "sans-serif";

const POOLED: RGBColor = RGBColor(0, 95, 175);
const PER_OP: RGBColor = RGBColor(200, 85, 0);
const FOUNDING: RGBColor = RGBColor(120, 120, 120);
const LIMIT: RGBColor = RGBColor(0, 120, 60);

/// One line of the picture: points of value size in bytes and MB/s.
struct Line {
    name: &'static str,
    color: RGBColor,
    dashed: bool,
    points: Vec<(f64, f64)>,
}

/// Writes the picture of `report` as SVG to `path`; its text uses the viewer's fonts.
///
/// # Errors
/// The file cannot be written, or the report has no results.
pub fn draw(report: &Report, path: &Path) -> Result<()> {
    let context = || format!("cannot draw {}", path.display());
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    paint(report, &root).with_context(context)?;
    root.present()
        .map_err(|error| anyhow!("{error}"))
        .with_context(context)
}

fn paint(report: &Report, root: &DrawingArea<SVGBackend<'_>, Shift>) -> Result<()> {
    let failed = |error: DrawingAreaErrorKind<_>| anyhow!("{error}");
    root.fill(&WHITE).map_err(failed)?;
    let (title, body) = root.split_vertically(64);
    let heading = format!(
        "Throughput of one synchronous client on {}, client and server polling",
        report.device.name
    );
    let centered = |size: i32| {
        (FONT, size)
            .into_font()
            .color(&BLACK)
            .pos(Pos::new(HPos::Center, VPos::Center))
    };
    let middle = SIZE.0 as i32 / 2;
    title
        .draw(&Text::new(heading, (middle, 22), centered(22)))
        .map_err(failed)?;
    title
        .draw(&Text::new(subtitle(report), (middle, 48), centered(14)))
        .map_err(failed)?;
    let lines = SHOWN.map(|operation| lines(report, operation));
    let range = throughput_range(lines.iter().flatten())
        .ok_or_else(|| anyhow!("the report has no results"))?;
    for ((area, operation), lines) in body.split_evenly((1, 2)).iter().zip(SHOWN).zip(&lines) {
        panel(area, operation, lines, range.clone())?;
    }
    Ok(())
}

fn subtitle(report: &Report) -> String {
    let machine = &report.machine;
    let debug = if machine.debug_build {
        " · DEBUG BUILD, figures void"
    } else {
        ""
    };
    format!(
        "{} · {} cores · Linux {} · {} · link: {}{debug}",
        machine.cpu, machine.cores, machine.kernel, machine.rustc, report.device.link
    )
}

fn lines(report: &Report, operation: Operation) -> Vec<Line> {
    let of = |mode: Mode| {
        report
            .results
            .iter()
            .filter(|row| row.op == operation && row.mode == mode)
            .filter(|row| row.wait == Wait::Poll && row.client_wait == Wait::Poll)
            .map(|row| (row.size as f64, row.mb_per_s))
            .collect()
    };
    let limits = report.limits.iter().filter(|limit| limit.op == operation);
    let founding = report.founding.iter().filter(|row| row.op == operation);
    let mut lines = vec![
        Line {
            name: "memcpy of the same bytes (the limit)",
            color: LIMIT,
            dashed: true,
            points: limits.map(|row| (row.size as f64, row.mb_per_s)).collect(),
        },
        Line {
            name: "pooled",
            color: POOLED,
            dashed: false,
            points: of(Mode::Pooled),
        },
        Line {
            name: "register per operation",
            color: PER_OP,
            dashed: false,
            points: of(Mode::RegisterPerOp),
        },
        Line {
            name: "register per operation, modelled NIC cost",
            color: PER_OP,
            dashed: true,
            points: of(Mode::RegisterPerOpModelled),
        },
        Line {
            name: "founding figures (a NIC, register per operation)",
            color: FOUNDING,
            dashed: true,
            points: founding
                .map(|row| (row.size as f64, row.mb_per_s))
                .collect(),
        },
    ];
    lines.retain(|line| !line.points.is_empty());
    lines
}

/// Whole decades around all points.
fn throughput_range<'a>(lines: impl Iterator<Item = &'a Line>) -> Option<Range<f64>> {
    let (mut low, mut high) = (f64::INFINITY, 0.0_f64);
    for (_, throughput) in lines.flat_map(|line| &line.points) {
        if throughput.is_finite() && *throughput > 0.0 {
            low = low.min(*throughput);
            high = high.max(*throughput);
        }
    }
    (high > 0.0).then(|| {
        // A label above the highest point needs room.
        10_f64.powf((low * 0.7).log10().floor())..10_f64.powf((high * 1.5).log10().ceil())
    })
}

/// A logarithmic axis whose labelled marks are given.
type Axis = WithKeyPoints<LogCoord<f64>>;

type Panel<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<Axis, Axis>>;

fn panel(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    operation: Operation,
    lines: &[Line],
    range: Range<f64>,
) -> Result<()> {
    let failed = |error: DrawingAreaErrorKind<_>| anyhow!("{error}");
    let mut sizes: Vec<f64> = lines
        .iter()
        .flat_map(|line| line.points.iter().map(|point| point.0))
        .collect();
    sizes.sort_unstable_by(f64::total_cmp);
    sizes.dedup();
    let across = sizes[0] * 0.6..sizes[sizes.len() - 1] * 1.7;
    let decades = || (range.start.log10() as i32..range.end.log10() as i32).map(|d| 10_f64.powi(d));
    let between = decades().flat_map(|decade| (2..10).map(move |digit| decade * f64::from(digit)));
    let (between, mut marks) = (between.collect::<Vec<_>>(), decades().collect::<Vec<_>>());
    marks.push(range.end);

    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .caption(operation.name(), (FONT, 20))
        .x_label_area_size(48)
        .y_label_area_size(72)
        .build_cartesian_2d(
            across.log_scale().with_key_points(sizes),
            range
                .log_scale()
                .with_key_points(marks)
                .with_light_points(between),
        )
        .map_err(failed)?;
    chart
        .configure_mesh()
        .x_desc("value size")
        .y_desc("MB/s (1e6 bytes)")
        .axis_desc_style((FONT, 15))
        .label_style((FONT, 13))
        .bold_line_style(BLACK.mix(0.18))
        .light_line_style(BLACK.mix(0.05))
        .x_label_formatter(&|size| bytes(*size as usize))
        .y_label_formatter(&|value| value.to_string())
        .draw()
        .map_err(failed)?;
    for line in lines {
        trace(&mut chart, line)?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerRight)
        .background_style(WHITE.mix(0.9))
        .border_style(BLACK.mix(0.3))
        .label_font((FONT, 13))
        .margin(8)
        .draw()
        .map_err(failed)
}

fn trace<'a, 'b: 'a>(chart: &mut Panel<'a, 'b>, line: &Line) -> Result<()> {
    let failed = |error: DrawingAreaErrorKind<_>| anyhow!("{error}");
    let style = line.color.stroke_width(2);
    let points = || line.points.iter().copied();
    let dashed = line.dashed;
    let annotation = if dashed {
        chart.draw_series(DashedLineSeries::new(points(), 6, 4, style))
    } else {
        chart.draw_series(LineSeries::new(points(), style))
    };
    annotation
        .map_err(failed)?
        .label(line.name)
        .legend(move |(x, y)| {
            let ends = [(x, y), (x + 22, y)];
            if dashed {
                DashedPathElement::new(ends, 6, 4, style).into_dyn()
            } else {
                PathElement::new(ends, style).into_dyn()
            }
        });
    chart
        .draw_series(points().map(|point| Circle::new(point, 3, line.color.filled())))
        .map_err(failed)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(points: &[(f64, f64)]) -> Line {
        Line {
            name: "",
            color: POOLED,
            dashed: false,
            points: points.to_vec(),
        }
    }

    #[test]
    fn the_range_is_whole_decades_around_the_points() {
        let lines = [
            line(&[(128.0, 1.0), (4096.0, 37.0)]),
            line(&[(128.0, 9500.0)]),
        ];
        assert_eq!(throughput_range(lines.iter()), Some(0.1..100_000.0));
        assert_eq!(throughput_range([line(&[])].iter()), None);
        assert_eq!(throughput_range([line(&[(1.0, f64::NAN)])].iter()), None);
    }
}
