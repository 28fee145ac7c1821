//! Which RM objects a free takes along.
//!
//! RM frees children with their parent and everything with its client
//! (`serverFreeResourceTree` of the resource server). We keep the tree because a placement
//! must leave the window before its memory goes, and because of what objects hold of the
//! guest's budgets.

use std::collections::hash_map::Entry;
use std::collections::HashMap;
use std::sync::Arc;

use super::calls::u32_at;
use super::registered::Registration;
use super::slices::Group;
use super::video::Block;

/// Deeper than any chain of parents that RM makes.
const MAX_DEPTH: usize = 32;

/// What an object has of the guest's budgets, or must be known for.
#[derive(Clone, Debug, Default)]
pub enum Holds {
    /// Neither memory nor time.
    #[default]
    Nothing,
    /// Memory of the card, together with its duplicates.
    Video(Arc<Block>),
    /// System memory, which is nobody's budget: the card snoops it.
    System,
    /// The same, of the guest's own.
    Guest(Arc<Registration>),
    /// A channel group's time.
    Time(Group),
}

#[derive(Debug)]
struct Node {
    parent: u32,
    holds: Holds,
}

/// The tree of every client of this process.
#[derive(Debug, Default)]
pub struct Objects {
    nodes: HashMap<(u32, u32), Node>,
    /// How many objects each has below it: most that are freed have none.
    children: HashMap<(u32, u32), u32>,
    owners: HashMap<u32, u32>,
    /// Clients and objects that calls under way will make.
    expected: (usize, usize),
    /// Objects that are memory of the guest's own: their clients.
    registered: HashMap<u32, Vec<u32>>,
    /// Such memory that RM may have for something else of the client: as long as that lives.
    kept: HashMap<u32, Vec<Arc<Registration>>>,
}

impl Objects {
    /// `client` was made on `file`, which owns it.
    pub fn client(&mut self, client: u32, file: u32) {
        self.owners.insert(client, file);
    }

    /// `object` was made below `parent`.
    pub fn made(&mut self, client: u32, object: u32, parent: u32, holds: Holds) {
        self.forget(client, object);
        if matches!(holds, Holds::Guest(_)) {
            self.registered.entry(object).or_default().push(client);
        }
        self.nodes.insert((client, object), Node { parent, holds });
        *self.children.entry((client, parent)).or_default() += 1;
    }

    fn forget(&mut self, client: u32, object: u32) -> Option<Holds> {
        let Node { parent, holds } = self.nodes.remove(&(client, object))?;
        if matches!(holds, Holds::Guest(_)) {
            if let Entry::Occupied(mut clients) = self.registered.entry(object) {
                clients.get_mut().retain(|&other| other != client);
                if clients.get().is_empty() {
                    clients.remove();
                }
            }
        }
        if let Entry::Occupied(mut count) = self.children.entry((client, parent)) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
        Some(holds)
    }

    /// What an object holds; a duplicate holds the same.
    pub fn holds(&self, client: u32, object: u32) -> Holds {
        self.nodes.get(&(client, object)).map(|node| node.holds.clone()).unwrap_or_default()
    }

    /// A call of `caller` has these bytes: memory of the guest's own whose object it may name is
    /// RM's until that client and the object's own are freed, for a channel, say, keeps the memory
    /// that it is made over.
    pub fn may_keep(&mut self, caller: u32, bytes: &[u8]) {
        let words = bytes.chunks_exact(4).map(|word| u32_at(word, 0));
        for object in words {
            for &owner in self.registered.get(&object).into_iter().flatten() {
                let Some(Node { holds: Holds::Guest(named), .. }) =
                    self.nodes.get(&(owner, object))
                else {
                    continue;
                };
                // A client that is none of this process's RM refuses.
                let known = [caller, owner].into_iter().filter(|it| self.owners.contains_key(it));
                for client in known {
                    let kept = self.kept.entry(client).or_default();
                    if !kept.iter().any(|known| Arc::ptr_eq(known, named)) {
                        kept.push(Arc::clone(named));
                    }
                }
            }
        }
    }

    /// The time of a channel group.
    pub fn group(&mut self, client: u32, object: u32) -> Option<&mut Group> {
        match &mut self.nodes.get_mut(&(client, object))?.holds {
            Holds::Time(group) => Some(group),
            _ => None,
        }
    }

    /// Every channel group: client and object.
    pub fn groups(&self) -> Vec<(u32, u32)> {
        let groups = self.nodes.iter().filter(|(_, node)| matches!(node.holds, Holds::Time(_)));
        groups.map(|(&name, _)| name).collect()
    }

    /// The file that `client` was made on.
    pub fn owner(&self, client: u32) -> Option<u32> {
        self.owners.get(&client).copied()
    }

    /// Whether `object` was made and is not gone.
    pub fn knows(&self, client: u32, object: u32) -> bool {
        self.nodes.contains_key(&(client, object))
    }

    /// Whether freeing `freed` takes `object` along.
    pub fn goes_with(&self, client: u32, object: u32, freed: u32) -> bool {
        let parents = |object: &u32| self.nodes.get(&(client, *object)).map(|node| node.parent);
        freed == client
            || std::iter::successors(Some(object), parents).take(MAX_DEPTH).any(|o| o == freed)
    }

    /// `freed` is gone, and what went with it; the memory that they held.
    pub fn freed(&mut self, client: u32, freed: u32) -> Vec<Holds> {
        let gone: Vec<u32> = match freed == client || self.children.contains_key(&(client, freed)) {
            true => self.below(client, freed),
            false => vec![freed],
        };
        let held = gone.into_iter().filter_map(|object| self.forget(client, object));
        let held = held.filter(|holds| matches!(holds, Holds::Video(_) | Holds::Guest(_)));
        let mut held: Vec<Holds> = held.collect();
        if freed == client {
            self.owners.remove(&client);
            held.extend(self.kept.remove(&client).into_iter().flatten().map(Holds::Guest));
        }
        held
    }

    /// What a free takes along, itself included.
    fn below(&self, client: u32, freed: u32) -> Vec<u32> {
        let own =
            self.nodes.keys().filter(|(owner, _)| *owner == client).map(|(_, object)| *object);
        own.filter(|&object| self.goes_with(client, object, freed)).collect()
    }

    /// The clients of `file` will go with it; the memory that they hold, which is RM's until
    /// the file is closed.
    #[must_use]
    pub fn closed(&mut self, file: u32) -> Vec<Holds> {
        let clients: Vec<u32> = self
            .owners
            .iter()
            .filter_map(|(&client, &owner)| (owner == file).then_some(client))
            .collect();
        clients.into_iter().flat_map(|client| self.freed(client, client)).collect()
    }

    /// A call will make a client or an object; how many there are with it.
    pub fn expect(&mut self, client: bool) -> u64 {
        *self.expected(client) += 1;
        let (clients, objects) = self.count();
        let have = if client { clients } else { objects };
        (have + *self.expected(client)) as u64
    }

    /// The call is over, whatever came of it.
    pub fn expected_no_more(&mut self, client: bool) {
        *self.expected(client) -= 1;
    }

    fn expected(&mut self, client: bool) -> &mut usize {
        if client {
            &mut self.expected.0
        } else {
            &mut self.expected.1
        }
    }

    /// Clients and objects alive, for limits and tallies.
    pub fn count(&self) -> (usize, usize) {
        (self.owners.len(), self.nodes.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree() -> Objects {
        let mut objects = Objects::default();
        objects.client(1, 0x1_0001);
        objects.made(1, 10, 1, Holds::Nothing);
        objects.made(1, 20, 10, Holds::Nothing);
        objects.made(1, 30, 20, Holds::Nothing);
        objects.made(1, 40, 10, Holds::Nothing);
        objects
    }

    #[test]
    fn a_free_takes_along_what_is_below_and_nothing_else() {
        let objects = tree();
        assert!(objects.goes_with(1, 30, 20));
        assert!(objects.goes_with(1, 30, 10));
        assert!(objects.goes_with(1, 30, 1));
        assert!(!objects.goes_with(1, 40, 20));
        assert!(!objects.goes_with(2, 30, 20));
    }

    #[test]
    fn what_was_freed_is_forgotten_with_all_below_it() {
        let mut objects = tree();
        objects.freed(1, 20);
        assert_eq!(objects.count(), (1, 2));
        objects.freed(1, 40);
        assert_eq!(objects.count(), (1, 1));
        assert!(objects.closed(0x1_0001).is_empty());
        assert_eq!(objects.count(), (0, 0));
        assert!(objects.children.is_empty());
    }

    #[test]
    fn a_cycle_of_parents_ends() {
        let mut objects = Objects::default();
        objects.made(1, 10, 11, Holds::Nothing);
        objects.made(1, 11, 10, Holds::Nothing);
        assert!(!objects.goes_with(1, 10, 99));
    }
}
