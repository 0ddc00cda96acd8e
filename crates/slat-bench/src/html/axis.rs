//! The axis of a chart, which converts values to positions.

/// If the largest value divided by the smallest exceeds this ratio, the axis is logarithmic, because small bars would
/// be invisible on a linear axis.
const LINEAR: f64 = 30.0;

/// The scale of a chart's axis, and the values at its ends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Axis {
    /// A linear axis, which begins at 0.
    Linear {
        /// The value at the right end of the axis.
        to: f64,
        /// The difference of the values of two neighbouring marks of the axis.
        step: f64,
    },
    /// A logarithmic axis, which marks powers of ten.
    Logarithmic {
        /// The exponent of the value at the left end.
        from: i32,
        /// The exponent of the value at the right end.
        to: i32,
    },
}

impl Axis {
    /// Makes an axis for `values`. If a linear axis would make small values invisible, the axis is logarithmic. On both
    /// kinds of axis, the value 0 is at the left end.
    pub fn over(values: &[f64]) -> Self {
        let most = values.iter().copied().fold(0.0, f64::max);
        let least = values
            .iter()
            .copied()
            .filter(|value| *value > 0.0)
            .fold(f64::INFINITY, f64::min);
        if most <= 0.0 {
            return Axis::Linear { to: 1.0, step: 1.0 };
        }
        if most / least > LINEAR {
            let exponent = |value: f64| value.log10();
            // The axis begins below the smallest value, so that the bar of this value is visible, too.
            return Axis::Logarithmic {
                from: (exponent(least) - 0.1).floor() as i32,
                to: exponent(most).ceil() as i32,
            };
        }
        let decade = 10f64.powf(most.log10().floor());
        let step = [0.5, 1.0, 2.0, 5.0]
            .map(|step| step * decade)
            .into_iter()
            .find(|step| most / step <= 4.0)
            .unwrap_or(5.0 * decade);
        Axis::Linear {
            to: (most / step).ceil() * step,
            step,
        }
    }

    /// Returns the position of a value: 0 is the left end of the axis, and 1 the right end.
    pub fn place(&self, value: f64) -> f64 {
        let place = match *self {
            Axis::Linear { to, .. } => value / to,
            Axis::Logarithmic { .. } if value <= 0.0 => 0.0,
            Axis::Logarithmic { from, to } => {
                (value.log10() - f64::from(from)) / f64::from(to - from)
            }
        };
        place.clamp(0.0, 1.0)
    }

    /// Returns the values that have a mark on the axis.
    pub fn marks(&self) -> Vec<f64> {
        match *self {
            Axis::Linear { to, step } => {
                let steps = (to / step).round() as u32;
                (0..=steps).map(|n| f64::from(n) * step).collect()
            }
            Axis::Logarithmic { from, to } => {
                let every = ((to - from) / 4).max(1) as usize;
                (from..=to).step_by(every).map(|n| 10f64.powi(n)).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_has_a_place_and_greater_ones_lie_further_right() {
        for values in [
            &[1.0, 7.0, 93.0][..],
            &[3e-7, 1.0, 16.1],
            &[0.0, 5.0, 262_144.0],
            &[1.0],
            &[1000.0, 2000.0],
            &[0.0, 0.0],
        ] {
            let axis = Axis::over(values);
            let places: Vec<_> = values.iter().map(|value| axis.place(*value)).collect();
            assert!(places.is_sorted(), "{axis:?} {places:?}");
            for (value, place) in values.iter().zip(places) {
                assert_eq!(*value > 0.0, place > 0.0, "{axis:?}: {value} at {place}");
            }
            let marks = axis.marks();
            assert!((2..=9).contains(&marks.len()), "{marks:?}");
            assert!(axis.place(marks[0]) == 0.0);
        }
    }

    #[test]
    fn a_wide_span_is_logarithmic() {
        assert!(matches!(Axis::over(&[1.0, LINEAR]), Axis::Linear { .. }));
        assert!(matches!(
            Axis::over(&[1.0, LINEAR + 1.0]),
            Axis::Logarithmic { .. }
        ));
        assert!(matches!(
            Axis::over(&[0.0, LINEAR + 1.0]),
            Axis::Linear { .. }
        ));
    }
}
